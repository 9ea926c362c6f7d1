"""Deployments: manifests, images, units and scripts, and the application for Ray Serve."""
