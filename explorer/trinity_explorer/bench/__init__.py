"""What evaluations say of a model: estimates over the tasks of a set, with their uncertainty."""
