"""The best plan within a budget; `budget.plan` is `gradfilter.plan`."""
