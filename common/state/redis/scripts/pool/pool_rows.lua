-- uses: pool
-- The workers or the gangs of the mesh, or one gang.
local out = {}
if args.gang then
  out[1] = gang_json(args.gang)
elseif args.what == 'gangs' then
  for _, id in ipairs(redis.call('ZRANGE', GANGS, 0, -1)) do out[#out + 1] = gang_json(id) end
else
  for _, id in ipairs(redis.call('ZRANGE', WORKERS, 0, -1)) do
    local lease = redis.call('HMGET', MESH .. ':entry:' .. worker_name(id), 'expires_ms',
      'renewed_ms')
    local live = lease[1] and is_live(lease[1], lease[2])
    out[#out + 1] = string.format('{"alive":%s,', live and 'true' or 'false')
      .. string.sub(worker_json(id), 2)
  end
end
return '{"rows":[' .. table.concat(out, ',') .. ']}'
