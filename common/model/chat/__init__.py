"""Chats as tokens, by the template of a checkpoint. Open `chat.py` first."""
