-- Common part before every script. Everything is local because Redis rejects globals. Keys are
-- built from the prefixes of the mesh and the job. They are not declared: there is one primary,
-- never a cluster.
local MESH = '{mesh}'
local args = cjson.decode(ARGV[1])

local time = redis.call('TIME')
local NOW = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)

local function read_hash(key)
  local flat, fields = redis.call('HGETALL', key), {}
  for i = 1, #flat, 2 do fields[flat[i]] = flat[i + 1] end
  return fields
end

-- Answers a rejection; the client raises the error with this code.
local function reject(code, text)
  return cjson.encode({error_code = code, text = text})
end

-- A client sends an operation again if its reply was lost. The second run of the same script and
-- operation returns the first result. Callers retry for an hour at most. The next operation
-- acknowledges an answered one. After that, only a copy on a broken connection can arrive; TCP
-- drops such a copy in under two minutes.
local OPERATION_TTL_MS, ACKNOWLEDGED_TTL_MS = 7200000, 120000
local OPERATION = args.op and KEYS[1] .. ':op:' .. SCRIPT .. ':' .. args.op

-- Called after all other writes: a server without memory rejects only a script's first write.
local function expire_acknowledged()
  for _, key in ipairs(args.acknowledged or {}) do
    redis.call('PEXPIRE', key, ACKNOWLEDGED_TTL_MS)
  end
end

local function previous_reply()
  local previous = OPERATION and redis.call('GET', OPERATION)
  if previous then expire_acknowledged() end
  return previous
end

-- Answers an operation that has changed nothing; a retry may change something.
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

-- Appends an event and returns its id. `extra` is JSON text that passes through unparsed, so that
-- its empty lists and long floats stay as they are.
local function append_event(kind, fields, extra)
  return redis.call('XADD', MESH .. ':events', '*', 'kind', kind,
    'fields', fields and cjson.encode(fields) or '{}', 'extra', extra or '{}')
end

-- Records progress of a job: a group, a step or an evaluation. `slowest_progress_ms` estimates the
-- longest time between two; a much longer wait means that no progress will come.
local function record_progress(prefix)
  local key = prefix .. ':job'
  local before = redis.call('HMGET', key, 'progress_ms', 'slowest_progress_ms')
  local elapsed = NOW - tonumber(before[1] or NOW)
  local slowest = math.max(elapsed, math.floor(0.9 * tonumber(before[2] or 0)))
  redis.call('HSET', key, 'progress_ms', NOW, 'slowest_progress_ms', slowest)
  redis.call('HINCRBY', key, 'progress', 1)
end

-- Tokens start at the time at which the mesh began. They therefore rise even if Redis lost all
-- data.
local function next_token()
  redis.call('SET', MESH .. ':token', NOW, 'NX')
  return redis.call('INCR', MESH .. ':token')
end

-- True if a lease is live. A renewal time in the future, beyond usual clock corrections, dates from
-- before the server's clock was set back. Such a lease would keep a dead process's name until then.
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
  return reject('fenced', 'the lease of ' .. name .. ' has expired or has another holder')
end
