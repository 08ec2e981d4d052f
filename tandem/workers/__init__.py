"""What runs on a rank: one class a role, an engine and the verbs that the controller may call on it."""
