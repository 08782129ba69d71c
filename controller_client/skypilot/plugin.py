"""A SkyPilot plugin that does nothing: naming it makes SkyPilot carry our wheel to the controller.

See `deploy/skypilot/README.md`, "Plugin wheels". The hook in the wheel does the work there; the
serve process itself loads no plugins.
"""

from sky.server.plugins import BasePlugin


class SkyServeLb(BasePlugin):  # type: ignore[misc]  # SkyPilot is no dependency here
    """Named in `remote_plugins.yaml`."""

    @property
    def name(self) -> str:
        """The plugin's name for display."""
        return "skyserve-lb"

    def install(self, extension_context: object) -> None:
        """Nothing to install."""
