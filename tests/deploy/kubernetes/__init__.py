"""Tests of compose/kubernetes: by schemas, by checks that no schema can make, and by running it.

Usage:

python -m tests.deploy.kubernetes.schemas     validates every object; prints JSON
python -m tests.deploy.kubernetes             that, and trains on a mesh of pods; prints JSON
"""
