-- Who leads now, if anyone.
local row = hash(MESH .. ':leader:' .. a.election)
if row.token and tonumber(row.expires_ms) > NOW then
  return cjson.encode({owner = row.owner, token = tonumber(row.token)})
end
return cjson.encode({owner = '', token = 0})
