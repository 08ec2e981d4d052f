"""OpenAI's published interface in front of whatever answers it (`base.Answerer`)."""
