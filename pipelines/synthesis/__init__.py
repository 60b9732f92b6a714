"""Questions and answers that an LM writes about documents: what is asked, who writes, and what is kept."""
