-- Rows of the pool. A worker polls its own hash and reads its gang's hash. Snapshots read all rows,
-- and one call for each row would block lease renewals for too long. One hash of all workers and
-- one of all gangs therefore hold each row again, as JSON text. Scripts that change a row call
-- `update_worker_snapshot` or `update_gang_snapshot`.
local WORKERS, WORKER = MESH .. ':workers', MESH .. ':worker:'
local GANGS, GANG = MESH .. ':gangs', MESH .. ':gang:'
local WORKERS_SNAPSHOT, GANGS_SNAPSHOT = MESH .. ':snapshot:workers', MESH .. ':snapshot:gangs'
local REQUESTS, MOVES = MESH .. ':requests', MESH .. ':moves'
local SERVICES, HOSTS, DRAINING = MESH .. ':services:', MESH .. ':hosts', MESH .. ':draining'
local NOTICES = MESH .. ':notices' -- of preemption, by host
local PLANNER = MESH .. ':planner' -- {formed, revision, memory, memory_ms}

local function worker_name(id) return 'worker/' .. id end

-- Returns a worker's row as JSON; nil if there is none. Its fields are stored as JSON.
local function worker_json(id)
  local row = redis.call('HMGET', WORKER .. id, 'details', 'token', 'gang', 'membership',
    'revision')
  return row[1] and '{"id":"' .. id .. '","details":' .. row[1] .. ',"token":' .. row[2]
    .. ',"gang":"' .. row[3] .. '","membership":' .. row[4] .. ',"revision":' .. row[5] .. '}'
end

-- Returns a gang's row as JSON; nil if there is none. Its fields are stored as JSON.
local function gang_json(id)
  local flat = redis.call('HGETALL', GANG .. id)
  if #flat == 0 then return nil end
  local parts = {'{"id":"', id, '"'}
  for i = 1, #flat, 2 do parts[#parts + 1] = ',"' .. flat[i] .. '":' .. flat[i + 1] end
  return table.concat(parts) .. '}'
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

-- Deletes a worker's reports on instances: after its loss or restart they are no longer valid.
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
