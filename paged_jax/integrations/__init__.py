"""Integrations of training frameworks that sample with the engine, each with its own extra."""
