-- uses: pool snapshot_stats
-- Answers the planner leader's input as one consistent snapshot. Registry: live processes with the
-- stats that matter, and the last stats of `offline_agents`. Jobs: those that have not ended, with
-- documents only if their digest is not in `known`.
if not is_leader(args.election, args.token) then
  return reject_fenced('the leader of ' .. args.election)
end
local ENTRY, ENTRIES = MESH .. ':entry:', MESH .. ':entries'
local FAR_MS = 60000 -- a lease that lasts longer may be from before the clock was set back

local parts, n = {}, 0
local function put(...)
  for i = 1, select('#', ...) do parts[n + i] = (select(i, ...)) end
  n = n + select('#', ...)
end

-- Appends JSON texts, separated by commas. Joining them first would copy them once more.
local function put_all(texts)
  for i = 1, #texts do
    if i > 1 then n = n + 1; parts[n] = ',' end
    n = n + 1
    parts[n] = texts[i]
  end
end

-- Scores are read only for leases that seem to last too long: scores as text are slow.
put('{"now_ms":', string.format('%.0f', NOW), ',"alive":')
local alive, worker_ids = {}, {}
local function add_live(name)
  alive[name] = true
  if string.sub(name, 1, 7) == 'worker/' then worker_ids[#worker_ids + 1] = string.sub(name, 8) end
end
local far_ms = string.format('%.0f', NOW + FAR_MS)
for _, name in ipairs(redis.call('ZRANGEBYSCORE', ENTRIES, string.format('(%.0f', NOW), far_ms)) do
  add_live(name)
end
local leases = redis.call('ZRANGEBYSCORE', ENTRIES, '(' .. far_ms, '+inf', 'WITHSCORES')
for i = 1, #leases, 2 do
  if is_live(leases[i + 1], redis.call('HGET', ENTRY .. leases[i], 'renewed_ms')) then
    add_live(leases[i])
  end
end
put(#worker_ids > 0 and cjson.encode(worker_ids) or '[]', ',"processes":[')
local stats, texts, offline = redis.call('HGETALL', STATS_SNAPSHOT), {}, {}
for i = 1, #stats, 2 do
  if alive[stats[i]] then
    texts[#texts + 1] = stats[i + 1]
  elseif string.sub(stats[i], 1, 5) == 'node/' then
    offline[#offline + 1] = stats[i + 1]
  end
end
put_all(texts)
put('],"offline_agents":[')
put_all(offline)
put('],"workers":[')
put_all(redis.call('HVALS', WORKERS_SNAPSHOT))
put('],"gangs":[')
put_all(redis.call('HVALS', GANGS_SNAPSHOT))
put(']')

local known = {}
for _, digest in ipairs(args.known) do known[digest] = true end
local active = redis.call('ZRANGE', MESH .. ':jobs:active', 0, -1, 'WITHSCORES')
put(',"jobs":[')
for i = 1, #active, 2 do
  local key = '{' .. active[i] .. '}:job'
  local row = redis.call('HMGET', key, 'phase', 'groups_per_step', 'steps_done', 'block_reason',
    'checkpoint', 'digest', 'stale_requeued')
  local document = 'null'
  if not row[6] or not known[row[6]] then
    document = redis.call('HGET', '{' .. active[i] .. '}:submission', 'document')
  end
  put(i > 1 and ',' or '', '{"id":', cjson.encode(active[i]), ',"phase":"', row[1],
    '","groups_per_step":', row[2], ',"steps_done":', row[3], ',"block_reason":',
    cjson.encode(row[4] or ''), ',"checkpoint":', cjson.encode(row[5]),
    ',"stale_requeued":', row[7] or '0', ',"digest":"',
    row[6] or '', '","submitted_ms":', active[i + 1], ',"document":', document, '}')
end

put('],"hosts":[')
for i, host in ipairs(redis.call('ZRANGE', HOSTS, 0, -1)) do
  put(i > 1 and ',' or '', '{"name":', cjson.encode(host), ',"services":',
    redis.call('GET', SERVICES .. host) or '[]', '}')
end
put(']')

-- Appends a hash whose values are stored as JSON.
local function put_object(key)
  local flat = redis.call('HGETALL', key)
  put('{')
  for i = 1, #flat, 2 do put(i > 1 and ',' or '', cjson.encode(flat[i]), ':', flat[i + 1]) end
  put('}')
end

put(',"draining":', cjson.encode(read_hash(DRAINING)), ',"notices":')
put_object(NOTICES)
put(',"requests":')
put_object(REQUESTS)
put(',"moves_in_progress":')
put_object(MOVES)
local planner = redis.call('HMGET', PLANNER, 'formed', 'revision', 'memory')
put(',"settings":', redis.call('GET', MESH .. ':settings') or '{}', ',"formed":',
  planner[1] or '0', ',"revision":', planner[2] or '0', ',"memory":', planner[3] or 'null', '}')
return table.concat(parts)
