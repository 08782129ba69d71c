"""The load balancer: see `lb.app` for how it is put together, `lb.proxy` for the path of a request."""
