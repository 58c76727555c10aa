-- Rows of the pool. A worker's own hash is what it polls, a gang's is what its workers read. A look
-- reads all of them: each row stands once more, as the text that answers are put together from, in
-- one hash of all workers and one of all gangs, because a call for each row would hold up every
-- lease. `update_worker_snapshot` and `update_gang_snapshot` bring that up to date; whoever changes
-- a row calls them.
local WORKERS, WORKER = MESH .. ':workers', MESH .. ':worker:'
local GANGS, GANG = MESH .. ':gangs', MESH .. ':gang:'
local WORKERS_SNAPSHOT, GANGS_SNAPSHOT = MESH .. ':snapshot:workers', MESH .. ':snapshot:gangs'
local REQUESTS, MOVES = MESH .. ':requests', MESH .. ':moves'
local SERVICES, HOSTS, DRAINING = MESH .. ':services:', MESH .. ':hosts', MESH .. ':draining'
local PLANNER = MESH .. ':planner' -- {formed, revision, memory, memory_ms}

local function worker_name(id) return 'worker/' .. id end

-- A worker's row, of fields that are JSON as they are stored; nothing without a row.
local function worker_json(id)
  local row = redis.call('HMGET', WORKER .. id, 'details', 'token', 'gang', 'membership',
    'revision')
  return row[1] and '{"id":"' .. id .. '","details":' .. row[1] .. ',"token":' .. row[2]
    .. ',"gang":"' .. row[3] .. '","membership":' .. row[4] .. ',"revision":' .. row[5] .. '}'
end

-- A gang's row: all its values are JSON as they are stored.
local function gang_json(id)
  local flat = redis.call('HGETALL', GANG .. id)
  if #flat == 0 then return nil end
  local out = {'{"id":"', id, '"'}
  for i = 1, #flat, 2 do out[#out + 1] = ',"' .. flat[i] .. '":' .. flat[i + 1] end
  return table.concat(out) .. '}'
end

local function update_entry(key, id, text)
  if text then redis.call('HSET', key, id, text) else redis.call('HDEL', key, id) end
end
local function update_worker_snapshot(id) update_entry(WORKERS_SNAPSHOT, id, worker_json(id)) end
local function update_gang_snapshot(id) update_entry(GANGS_SNAPSHOT, id, gang_json(id)) end

local function workers_of(gang)
  local text = redis.call('HGET', GANG .. gang, 'workers')
  return text and cjson.decode(text)
end

-- What a lost or restarted worker has said of its gang's residents is true no more.
local function delete_reports(worker)
  local gang = redis.call('HGET', WORKER .. worker, 'gang')
  local workers = gang and gang ~= '' and workers_of(gang)
  if not workers then return end
  for index, other in ipairs(workers) do
    if other == worker then
      for field in pairs(read_hash(GANG .. gang)) do
        if string.match(field, '^report:.*:' .. (index - 1) .. '$') then
          redis.call('HDEL', GANG .. gang, field)
        end
      end
      update_gang_snapshot(gang)
    end
  end
end
