-- Goes before every script. All is local, because Redis refuses globals. Keys are made from the
-- mesh's and the job's prefix and not declared one by one: there is one primary and never a
-- cluster.
local MESH = '{mesh}'
local args = cjson.decode(ARGV[1])

local time = redis.call('TIME')
local NOW = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)

local function read_hash(key)
  local flat, fields = redis.call('HGETALL', key), {}
  for i = 1, #flat, 2 do fields[flat[i]] = flat[i + 1] end
  return fields
end

-- What the script would not do, and why; the client raises the error that has this code.
local function reject(code, text)
  return cjson.encode({error_code = code, text = text})
end

-- An operation is sent again when its reply was lost: the second run of the same script under the
-- same operation returns the first one's result. Callers try for an hour at most (`patiently`).
-- Once one has its answer, which it says with its next operation, only a copy may come that was on
-- its way over a connection that is gone; TCP gives such a one up in less than two minutes.
local OPERATION_TTL_MS, ACKNOWLEDGED_TTL_MS = 7200000, 120000
local OPERATION = args.op and KEYS[1] .. ':op:' .. SCRIPT .. ':' .. args.op

-- Not before anything else is written: a server without memory refuses a script's first write only.
local function expire_acknowledged()
  for _, key in ipairs(args.acknowledged or {}) do
    redis.call('PEXPIRE', key, ACKNOWLEDGED_TTL_MS)
  end
end

local function previous_reply()
  local seen = OPERATION and redis.call('GET', OPERATION)
  if seen then expire_acknowledged() end
  return seen
end

-- The answer of an operation that has changed nothing: tried again, it may.
local function reply_unchanged(result)
  expire_acknowledged()
  return cjson.encode(result)
end

local function reply(result)
  local text = cjson.encode(result)
  if OPERATION then redis.call('SET', OPERATION, text, 'PX', OPERATION_TTL_MS) end
  expire_acknowledged()
  return text
end

-- Tells of something, and returns the event's id. `extra` is JSON that passes through unread, so
-- that its empty lists and long floats stay as they are.
local function append_event(kind, fields, extra)
  return redis.call('XADD', MESH .. ':events', '*', 'kind', kind,
    'fields', fields and cjson.encode(fields) or '{}', 'extra', extra or '{}')
end

-- A job has come further: a group, a step, an evaluation. `slowest_progress_ms` is about the
-- longest that it takes to: what takes much longer than that does not come.
local function record_progress(prefix)
  local key = prefix .. ':job'
  local before = redis.call('HMGET', key, 'progress_ms', 'slowest_progress_ms')
  local gap = NOW - tonumber(before[1] or NOW)
  local slowest = math.max(gap, math.floor(0.9 * tonumber(before[2] or 0)))
  redis.call('HSET', key, 'progress_ms', NOW, 'slowest_progress_ms', slowest)
  redis.call('HINCRBY', key, 'progress', 1)
end

-- Counts up from the time at which the mesh began, so that tokens rise even when Redis lost all it
-- had.
local function next_token()
  redis.call('SET', MESH .. ':token', NOW, 'NX')
  return redis.call('INCR', MESH .. ':token')
end

-- Whether a lease lasts. One that was renewed in the future, by more than clocks are corrected by,
-- was so before this server's clock was set back: it would keep a dead process's name until then.
local MAX_CLOCK_STEP_MS = 10000

local function is_live(expires_ms, renewed_ms)
  return tonumber(expires_ms) > NOW and (tonumber(renewed_ms) or 0) <= NOW + MAX_CLOCK_STEP_MS
end

local function has_lease(name, token)
  local lease = redis.call('HMGET', MESH .. ':entry:' .. name, 'token', 'expires_ms', 'renewed_ms')
  return lease[1] and tonumber(lease[1]) == token and is_live(lease[2], lease[3])
end

local function is_leader(election, token)
  local lease = redis.call('HMGET', MESH .. ':leader:' .. election, 'token', 'expires_ms',
    'renewed_ms')
  return lease[1] and tonumber(lease[1]) == token and is_live(lease[2], lease[3])
end

local function reject_fenced(name)
  return reject('fenced', 'the lease of ' .. name .. ' is no longer its own')
end
