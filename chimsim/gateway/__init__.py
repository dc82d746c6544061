"""The gateway: the policies in front of running engines, for clients that speak OpenAI's protocol."""
