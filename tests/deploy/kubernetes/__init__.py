"""Tests of compose/kubernetes: schemas, checks beyond schemas, and a running mesh.

Usage:

    python -m tests.deploy.kubernetes.schemas     validate every object; print JSON
    python -m tests.deploy.kubernetes             also train on a mesh of pods; print JSON
"""
