"""`meshrl watch` and `meshrl top`: look at a mesh again and again. Open `mesh_polling.py` first."""
