-- One server: takes a command, and answers what the client's side turns into Python.
local parts = ...

local ended, perform, sweep = parts.ended, parts.perform, parts.sweep
local ceil, floor = math.ceil, math.floor
local find, match = string.find, string.match
local pcall, select, type = pcall, select, type

-- What a script returns, as Redis answers it; the text of an error comes second.
local function answered(reply)
  local kind = type(reply)
  if kind == 'string' then return reply end
  if kind == 'number' then return reply < 0 and ceil(reply) or floor(reply) end
  if kind == 'boolean' then return reply and 1 or nil end
  if kind ~= 'table' then return nil end
  if type(rawget(reply, 'err')) == 'string' then return nil, reply.err end
  if type(rawget(reply, 'ok')) == 'string' then return reply.ok end
  local list, n = {}, 0
  for _, item in ipairs(reply) do
    local one, failure = answered(item)
    n = n + 1
    if failure then one = {err = failure} end
    list[n] = one ~= nil and one
  end
  return list
end

-- The text of an error that ended a command, of a script or not.
local function failure(reason, script)
  if type(reason) ~= 'table' or not reason.err then
    reason = tostring(type(reason) == 'table' and reason[1] or reason)
    if find(reason, '^simulated/') then error(reason, 0) end -- a fault of this server itself
    reason = {err = 'ERR ' .. reason, line = match(reason, '^user_script:(%d+):')}
  end
  if not script then return reason.err end
  local at = reason.line and ', on @user_script:' .. reason.line .. '.' or ''
  return reason.err .. ' script: ' .. script .. at
end

-- A new server: its function, which takes the time in microseconds since 1970, '' or how the server
-- is full, and the words of a command. It answers a reply; nil and an error's text; nil, nil and
-- what this server does not have. The second function copies what it holds, for a new server to
-- begin with.
return function(held)
  local space = held or parts.keyspace()
  local function execute(micros, full, ...)
    space.micros, space.now_ms, space.full = micros, floor(micros / 1000), full
    if space.first <= space.last then sweep(space) end
    local done, reply = pcall(perform, space, {...}, select('#', ...))
    local script = ended(space)
    if done then
      if type(reply) == 'string' then return reply end
      if script then return answered(reply) end
      if type(reply) == 'table' then return reply.ok or reply end
      return reply
    end
    if type(reply) == 'table' and reply.missing then return nil, nil, reply.missing end
    return nil, failure(reply, script)
  end
  return execute, function() return parts.copied(space) end
end
