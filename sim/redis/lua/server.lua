-- Server: executes a command and returns a reply, which the client converts to Python.
local parts = ...

local end_command, perform, sweep = parts.end_command, parts.perform, parts.sweep
local ceil, floor = math.ceil, math.floor
local find, match = string.find, string.match
local pcall, select, type = pcall, select, type

-- Converts a script's result to a Redis reply. The second result is the text of an error.
local function convert_reply(reply)
  local kind = type(reply)
  if kind == 'string' then return reply end
  if kind == 'number' then return reply < 0 and ceil(reply) or floor(reply) end
  if kind == 'boolean' then return reply and 1 or nil end
  if kind ~= 'table' then return nil end
  if type(rawget(reply, 'err')) == 'string' then return nil, reply.err end
  if type(rawget(reply, 'ok')) == 'string' then return reply.ok end
  local list, n = {}, 0
  for _, item in ipairs(reply) do
    local one, failure = convert_reply(item)
    n = n + 1
    if failure then one = {err = failure} end
    list[n] = one ~= nil and one
  end
  return list
end

-- Formats the error that ended a command, with the script and line if it has one.
local function format_error(reason, script)
  if type(reason) ~= 'table' or not reason.err then
    reason = tostring(type(reason) == 'table' and reason[1] or reason)
    if find(reason, '^simulated/') then error(reason, 0) end -- defect of this simulated server
    reason = {err = 'ERR ' .. reason, line = match(reason, '^user_script:(%d+):')}
  end
  if not script then return reason.err end
  local at = reason.line and ', on @user_script:' .. reason.line .. '.' or ''
  return reason.err .. ' script: ' .. script .. at
end

-- Creates a server and returns two functions. The first executes a command. Its arguments are the
-- time in microseconds since 1970, the exhausted resource ('', 'OOM' or 'MISCONF') and the words of
-- the command. It returns a reply, or nil and the text of an error, or nil, nil and the name of a
-- missing feature. The second function returns a copy of the state for a restarted server.
return function(saved_state)
  local space = saved_state or parts.keyspace()
  local function execute(micros, full, ...)
    space.micros, space.now_ms, space.full = micros, floor(micros / 1000), full
    if space.first <= space.last then sweep(space) end
    local succeeded, reply = pcall(perform, space, {...}, select('#', ...))
    local script = end_command(space)
    if succeeded then
      if type(reply) == 'string' then return reply end
      if script then return convert_reply(reply) end
      if type(reply) == 'table' then return reply.ok or reply end
      return reply
    end
    if type(reply) == 'table' and reply.unsupported then return nil, nil, reply.unsupported end
    return nil, format_error(reply, script)
  end
  return execute, function() return parts.copy_state(space) end
end
