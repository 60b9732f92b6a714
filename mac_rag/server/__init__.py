"""The server: banks as models behind an OpenAI-compatible API, a page, and tools for agents (MCP).

`service` holds the banks and runs what is asked of them; `app` is HTTP around it; `mcp_tools` are the tools of agents.
"""
