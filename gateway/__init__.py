"""The HTTP edge: speaks the OpenAI API and drives each request through router, prefill and decode. Stateless."""
