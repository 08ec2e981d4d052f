"""How the pictures of each family are sized and which tokens stand for them: one file a kind of layout."""
