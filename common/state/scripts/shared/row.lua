-- One hash.
return cjson.encode({row = hash(KEYS[1])})
