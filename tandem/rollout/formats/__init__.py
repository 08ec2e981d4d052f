"""Messages <-> tokens: what opens a conversation, what continues it, and what the policy's tokens say."""
