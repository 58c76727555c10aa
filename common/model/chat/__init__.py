"""Chats as tokens, by the template of a checkpoint. Open `chat_format.py` first."""
