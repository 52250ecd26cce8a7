"""The EAGLE-3 draft: model, training-time test, vocabulary map, attachment to a policy."""
