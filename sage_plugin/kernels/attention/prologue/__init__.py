"""The norm and rotary embedding of Q and K before attention, in one pass over their bytes."""
