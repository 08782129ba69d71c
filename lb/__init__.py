"""The load balancer: `lb.app` puts it together, `lb.proxy` is the path of a request."""

__version__ = "0.1.0"
