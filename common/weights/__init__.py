"""Weight versions: manifests, identities, publication and receipt.

Open `layout/manifest.py` first. Identities (`layout/identity.py`) do not depend on the chunks.
"""
