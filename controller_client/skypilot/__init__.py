"""The add-on for a real SkyPilot: import hook, controller-side fix, drop-in balancer, doctor.

This package is imported at the start of every interpreter of SkyPilot's environment (see `hook`),
so nothing is imported here.
"""
