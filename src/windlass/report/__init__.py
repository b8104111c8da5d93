"""From a run folder to figures, pages and tables; reads files only."""
