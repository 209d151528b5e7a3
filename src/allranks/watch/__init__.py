"""See docs/design/architecture.md."""
