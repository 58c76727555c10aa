"""What is said in compose/kubernetes: by the schemas, by checks that no schema can make, and run.

python -m tests.deploy.kubernetes.schemas     validates every object; prints JSON
python -m tests.deploy.kubernetes             that, and trains on a mesh of pods; prints JSON
"""
