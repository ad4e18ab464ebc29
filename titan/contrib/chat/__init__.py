"""Conversations as training data: the messages of rows, and the chat template that turns them into tokens.

titan/data/conversations.py imports this package, for sources with a messages_key and for `titan generate --chat`.
"""

from .messages import Chat, TakeConversation, chat_of
from .template import ChatTemplate, answer_ends

__all__ = [
    "Chat",
    "ChatTemplate",
    "TakeConversation",
    "answer_ends",
    "chat_of",
    "take_conversation",
    "template_of",
]

take_conversation, template_of = TakeConversation, ChatTemplate.of
