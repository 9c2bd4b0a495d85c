"""What `spec doctor` looks at. No model is loaded, and no network is asked."""
