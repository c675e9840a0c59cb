"""Links: framed connections that carry one exchange after another."""
