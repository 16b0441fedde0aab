"""The apiserver: authenticates each request and hands it to whoever answers it.

Owns API keys, the HTTP error form, the OpenAPI description and the routes that are not a sandbox's. Knows no sandbox state: a sandbox's id
names its edge, and what is said to a sandbox passes through here as it comes, without being read or re-framed.
"""
