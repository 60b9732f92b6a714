"""The server: serves banks as models through an OpenAI-compatible API, a web page, and tools for agents (MCP).

`service` holds the banks and runs the work; `app` is the HTTP application around it; `mcp_tools` are the agents' tools.
"""
