"""Process groups as values, how ranks find each other, and what happens when one is lost."""
