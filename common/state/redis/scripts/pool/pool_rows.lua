-- uses: pool
-- Answers the mesh's workers with their liveness, or its gangs, or one gang.
local rows = {}
if args.gang then
  rows[1] = gang_json(args.gang)
elseif args.what == 'gangs' then
  for _, id in ipairs(redis.call('ZRANGE', GANGS, 0, -1)) do rows[#rows + 1] = gang_json(id) end
else
  for _, id in ipairs(redis.call('ZRANGE', WORKERS, 0, -1)) do
    local lease = redis.call('HMGET', MESH .. ':entry:' .. worker_name(id), 'expires_ms',
      'renewed_ms')
    local live = lease[1] and is_live(lease[1], lease[2])
    rows[#rows + 1] = string.format('{"alive":%s,', live and 'true' or 'false')
      .. string.sub(worker_json(id), 2)
  end
end
return '{"rows":[' .. table.concat(rows, ',') .. ']}'
