"""Chats by the template that a checkpoint carries; open `conversation.py` first."""
