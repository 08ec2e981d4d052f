"""Who speaks to the policy as its user, after its first answer."""
