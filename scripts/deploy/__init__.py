"""Deployments: manifests, images, units and scripts."""
