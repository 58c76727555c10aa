"""`meshrl watch` and `meshrl top`: poll a mesh repeatedly. Open `mesh_polling.py` first."""
