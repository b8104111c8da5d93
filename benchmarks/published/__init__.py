"""Published training runs of other teams: read their tables and score the planner's predictions on them."""
