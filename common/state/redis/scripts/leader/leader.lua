-- Who leads now, if anyone.
local row = hash(MESH .. ':leader:' .. a.election)
if row.token and lasts(row.expires_ms, row.renewed_ms) then
  return cjson.encode({owner = row.owner, token = tonumber(row.token)})
end
return cjson.encode({owner = '', token = 0})
