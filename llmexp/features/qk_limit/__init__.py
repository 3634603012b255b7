"""Limit the logits of attention by the weights of its queries and keys: QK-Clip.

heads  the largest logit of each head
"""
