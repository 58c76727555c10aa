"""Weight versions: manifests, identities, publication and receipt.

Open `manifest.py` first. Identities (`identity.py`) do not depend on the division into chunks.
"""
