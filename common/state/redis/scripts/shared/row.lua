-- One hash, with the fields of the one beside it, if there is one.
local row = hash(a.key)
if a.beside then for field, value in pairs(hash(a.beside)) do row[field] = value end end
return cjson.encode({row = row})
