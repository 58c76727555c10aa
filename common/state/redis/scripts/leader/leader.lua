-- Answers the live leader of an election; an empty owner if there is none.
local row = read_hash(MESH .. ':leader:' .. args.election)
if row.token and is_live(row.expires_ms, row.renewed_ms) then
  return cjson.encode({owner = row.owner, token = tonumber(row.token)})
end
return cjson.encode({owner = '', token = 0})
