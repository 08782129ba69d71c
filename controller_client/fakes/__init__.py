"""A fake controller and scriptable replicas on real sockets, each in a thread of its own.

`controller_client.testing` offers them as pytest fixtures. Nothing here needs pytest.
"""
