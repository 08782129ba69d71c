"""SkyServe on one machine: services whose replicas are local processes. A development tool."""
