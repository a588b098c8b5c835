"""x"""
LOOPS=[]
